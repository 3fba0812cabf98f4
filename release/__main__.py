"""Runs all checks before a release: python -m release [--quick | --dist]."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from headrace.versions import own_versions
from release import distribution, support
from release.compatibility import read, register, service
from release.environments import Environment, find_pythons
from release.smoke import CHECKS

_SMOKE = Path(__file__).with_name("smoke.py")
_CONSTRAINTS = distribution.ROOT / "constraints.txt"
#: Extras whose pinned build exists for one Python only.
_ONLY_FOR = {"torch": "3.11"}
_SMOKE_SECONDS = 300.0


def main() -> int:
    """Run the checks; return the number of problems."""
    parser = argparse.ArgumentParser(prog="python -m release", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the core only, without extras")
    parser.add_argument("--dist", action="store_true", help="only build and check sdist and wheel")
    options = parser.parse_args()
    problems: list[str] = []
    results = support.Results()
    sdist, wheel = distribution.build(distribution.ROOT / "build" / "dist")
    problems += distribution.metadata_problems(
        distribution.metadata_of(wheel), own_versions().headrace
    )
    problems += distribution.sdist_problems(sdist)
    problems += distribution.wheel_problems(wheel)
    print(f"built {wheel.name}")
    if options.dist:
        return _report(problems)
    with tempfile.TemporaryDirectory(prefix="headrace-release-") as folder:
        environments = []
        for version, python in find_pythons().items():
            environment = Environment.create(version, python, Path(folder) / version, wheel)
            environments.append(environment)
            results.extras[version] = {}
            for extra in CHECKS if not options.quick else [""]:
                problem = _check_extra(environment, wheel, extra, results)
                problems += [problem] if problem else []
        problems += _check_pairs(environments, results)
    if not options.quick and not problems:
        support_page = distribution.ROOT / "docs" / "support.md"
        support_page.write_text(support.update(support_page.read_text(), results))
    return _report(problems)


def _report(problems: list[str]) -> int:
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)
    print("ready for release" if not problems else f"{len(problems)} problems")
    return len(problems)


def _check_extra(
    environment: Environment, wheel: Path, extra: str, results: support.Results
) -> str:
    """Install and use an extra; return what failed, or ""."""
    version = environment.version
    found = results.extras[version]
    if _ONLY_FOR.get(extra, version) != version:
        found[extra] = None
        return ""
    name = extra or "core"
    try:
        if extra:
            environment.install("--constraint", str(_CONSTRAINTS), f"{wheel}[{extra}]")
        result = environment.run(_SMOKE, *([extra] if extra else []), seconds=_SMOKE_SECONDS)
        error = result.stderr if result.returncode else ""
    except subprocess.SubprocessError as failure:
        error = str(failure)
    found[extra] = not error
    print(f"Python {version}, {name}: {'failed' if error else 'ok'}", flush=True)
    return f"Python {version}, {name}: {error}" if error else ""


def _check_pairs(environments: list[Environment], results: support.Results) -> list[str]:
    """Read with clients of each version from servers of each version."""
    problems = []
    for servers in environments:
        with service(servers) as address:
            register(servers, address)
            for client in environments:
                for by_id in (False, True):
                    error = read(client, address, by_id=by_id)
                    key = client.version, servers.version, by_id
                    results.pairs[key] = error
                    must_work = client.version == servers.version or by_id
                    if must_work == bool(error):
                        outcome = error or "works, but should be refused"
                        problems.append(f"client and servers {key}: {outcome}")
        print(f"servers of Python {servers.version}: read by all clients", flush=True)
    return problems


if __name__ == "__main__":
    sys.exit(bool(main()))
