"""The half of the backend that knows the device: the CPU, one of it."""

import importlib
from typing import Any, NoReturn

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class CpuDriver(DriverBase):
    """Active where kernels are interpreted."""

    launch_metadata = None

    @classmethod
    def is_active(cls) -> bool:
        """Whether this process interprets kernels."""
        return bool(knobs.runtime.interpret)

    def map_python_to_cpp_type(self, ty: str) -> NoReturn:
        """Of use to a compiler only."""
        raise NotImplementedError("this backend compiles nothing")

    def get_current_target(self) -> GPUTarget:
        """A target that no compiler knows."""
        return GPUTarget("cpu", 0, 1)

    def get_current_device(self) -> int:
        """The one CPU."""
        return 0

    def set_current_device(self, device: int) -> None:
        """There is no other."""

    def get_current_stream(self, device: int | None = None) -> int:
        """Work is done when a call returns."""
        return 0

    def get_active_torch_device(self) -> Any:
        """Torch's name for it."""
        return importlib.import_module("torch").device("cpu")

    def get_device_interface(self) -> Any:
        """What torch offers per device."""
        return importlib.import_module("torch").cpu

    def get_benchmarker(self) -> NoReturn:
        """Nothing is tuned."""
        raise NotImplementedError("this backend tunes nothing")
