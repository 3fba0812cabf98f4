"""The Helm chart in the tests: sets of values, rendered objects, and the check of their fields."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes.client.models as models
import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "deploy"))
import render  # noqa: E402
from go_template import TemplateError, Templates  # noqa: E402

__all__ = ["CASES", "ROOT", "TemplateError", "Templates", "check_object", "objects", "render"]

_POD = {
    "env": [{"name": "MODE", "value": "true"}],
    "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
    "volumeMounts": [{"name": "data", "mountPath": "/data", "readOnly": True}],
    "podLabels": {"team": "vision"},
    "podAnnotations": {"example.com/owner": "vision"},
    "nodeSelector": {"pool": "cpu"},
    "tolerations": [{"key": "pool", "operator": "Equal", "value": "cpu", "effect": "NoSchedule"}],
    "affinity": {"podAntiAffinity": {}},
}
#: Values that together use every branch of the templates.
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "hpa": {"autoscaling": {"type": "hpa"}},
    "keda": {"autoscaling": {"type": "keda", "minReplicas": 0}},
    "keda-prometheus": {
        "autoscaling": {"type": "keda", "prometheusAddress": "http://prometheus:9090"}
    },
    "minimal": {"networkPolicy": {"enabled": False}, "image": {"tag": "2"}},
    "everything": {
        "fullnameOverride": "input",
        "image": {"repository": "registry/headrace", "digest": "sha256:" + "0" * 64},
        "imagePullSecrets": [{"name": "registry"}],
        "keys": {"serverSecret": "server-keys", "authorizedSecret": "clients"},
        "dispatcher": {
            "storage": {"storageClassName": "fast", "size": "1Gi"},
            "extraArgs": ["--job-gc-timeout=60000"],
            **_POD,
        },
        "worker": {
            "drainTimeoutSeconds": 30,
            "sharedMemory": "2Gi",
            "queueName": "input",
            "podDisruptionBudget": {"maxUnavailable": 2},
            "extraArgs": ["--tag=cpu", "--heartbeat-interval=500"],
            **_POD,
        },
        "parameterServer": {"enabled": True, "replicas": 3, **_POD},
        "coordinatorWorker": {
            "enabled": True,
            "sharedMemory": "1Gi",
            **_POD,
        },
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    },
}
#: Resources that no schema in the tests knows.
NOT_VALIDATED = {
    ("keda.sh/v1alpha1", "ScaledObject"),
    ("monitoring.coreos.com/v1", "ServiceMonitor"),
}
_MODELS = {
    ("apps/v1", "Deployment"): models.V1Deployment,
    ("apps/v1", "StatefulSet"): models.V1StatefulSet,
    ("autoscaling/v2", "HorizontalPodAutoscaler"): models.V2HorizontalPodAutoscaler,
    ("networking.k8s.io/v1", "NetworkPolicy"): models.V1NetworkPolicy,
    ("policy/v1", "PodDisruptionBudget"): models.V1PodDisruptionBudget,
    ("v1", "ConfigMap"): models.V1ConfigMap,
    ("v1", "Service"): models.V1Service,
}


@cache
def objects(case: str) -> tuple[dict[str, Any], ...]:
    """Return the objects that the chart makes from the values of a case."""
    texts = render.render_chart(CASES[case]).values()
    return tuple(each for text in texts for each in yaml.safe_load_all(text) if each)


def check_object(each: dict[str, Any]) -> None:
    """Check names, types and required fields against the API that the official client describes.

    Raises:
        ValueError: If a field is unknown, missing or of another type.
    """
    kind = each["apiVersion"], each["kind"]
    if kind in NOT_VALIDATED:
        return
    if kind not in _MODELS:
        raise ValueError(f"no model of {kind}")
    read = _MODELS[kind].model_validate(each)  # fails for unknown fields
    # The client also reads names of Python, such as `mount_path`.
    if read.model_dump(mode="json", by_alias=True, exclude_unset=True) != each:
        raise ValueError(f"a field of {kind} is not written as in the API")
