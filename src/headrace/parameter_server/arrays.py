"""Arrays of any framework as those of NumPy, and whether a framework is tracing now.

No framework is imported here: one whose arrays come along has been.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import FailedPreconditionError
from headrace.parameter_server.dtypes import dtype_named

__all__ = ["as_array", "is_foreign", "refuse_while_tracing"]


def as_array(value: Any) -> NDArray[Any]:
    """Return a number, or an array of NumPy, JAX or PyTorch, as one of NumPy; shared if it can be.

    Raises:
        FailedPreconditionError: It is a value that JAX traces, and has no numbers yet.
    """
    if type(value) is np.ndarray:
        return value
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _of_tensor(value, torch)
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(value, jax.core.Tracer):
        raise FailedPreconditionError(
            "a value that JAX is tracing has no numbers yet: return it from the traced function, "
            "and pass what the function returns"
        )
    return np.asarray(value)


def _of_tensor(tensor: Any, torch: Any) -> NDArray[Any]:
    tensor = tensor.detach().cpu()
    if tensor.dtype is torch.bfloat16:
        bits: NDArray[Any] = tensor.contiguous().view(torch.int16).numpy()
        return bits.view(dtype_named("bfloat16"))
    found: NDArray[Any] = tensor.resolve_conj().resolve_neg().numpy()
    return found


def is_foreign(value: Any) -> bool:
    """Whether a value is an array of a framework."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    return (torch is not None and isinstance(value, torch.Tensor)) or (
        jax is not None and isinstance(value, jax.Array)
    )


def refuse_while_tracing(what: str, instead: str = "read it outside and pass the array") -> None:
    """Raise while JAX traces a function: a value read now would stand in it for ever.

    Args:
        what: What is read.
        instead: What to do instead.

    Raises:
        FailedPreconditionError: It does.
    """
    core = sys.modules.get("jax._src.core")
    is_clean = getattr(core, "trace_state_clean", None)
    if is_clean is not None and not is_clean():
        raise FailedPreconditionError(
            f"{what} is read while JAX traces a function, which would keep this value for ever: "
            f"{instead}"
        )
