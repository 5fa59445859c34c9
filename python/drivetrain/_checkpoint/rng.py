"""The random generators of this process: Python, numpy, torch CPU and CUDA.

numpy and torch take part if the program imported them before; nothing is imported for a save.
"""

import random
from array import array
from typing import Any

from drivetrain._checkpoint.dtypes import loaded


def rng_state() -> dict[str, Any]:
    """The state of the generators, made of values a checkpoint can hold.

    Keys: ``python``; ``numpy`` (the legacy global generator); ``torch`` (uint8 tensor) and ``cuda``
    (a list of uint8 tensors, one per device), each only if there.
    """
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {"version": version, "words": array("I", words).tobytes(), "gauss": gauss}
    }
    if (numpy := loaded("numpy")) is not None:
        state["numpy"] = numpy.random.get_state(legacy=False)
    if (torch := loaded("torch")) is not None:
        state["torch"] = torch.random.get_rng_state()
        # asking for the state would initialise CUDA in a process that does not use it
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Sets the generators to what `rng_state` gave.

    numpy and torch are imported if their state is there. CUDA devices beyond those of this machine
    are left out.
    """
    if "python" in state:
        own = state["python"]
        words = array("I")
        words.frombytes(own["words"])
        random.setstate((own["version"], tuple(words), own["gauss"]))
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])
    if "torch" in state:
        import torch

        torch.random.set_rng_state(state["torch"].cpu())
        if torch.cuda.is_available():
            for device, value in enumerate(state.get("cuda", ())[: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(value.cpu(), device)
