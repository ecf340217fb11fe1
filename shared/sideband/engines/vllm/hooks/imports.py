"""Acts on a module of vLLM right after somebody has imported it.

Plugins are loaded in every process of a server, most of which never import its HTTP side: this way
nothing is imported for their sake, and no process has to be told from another by its name.
"""

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Action = Callable[[ModuleType], None]


class AfterImport(MetaPathFinder):
    """Finds the modules it waits for as everybody else does, and runs their action once."""

    def __init__(self, actions: Mapping[str, Action]) -> None:
        self._waiting = dict(actions)

    def install(self) -> None:
        """Act at once on what is imported already, and wait for the rest."""
        for name in list(self._waiting):
            module = sys.modules.get(name)
            if module is not None:
                self._waiting.pop(name)(module)
        if self._waiting:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The ordinary spec with a loader that acts after the module ran."""
        action = self._waiting.pop(fullname, None)  # first, since finding comes back here
        if action is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return None
        spec.loader = _ActingLoader(spec.loader, action)
        return spec


class _ActingLoader(Loader):
    """The module's own loader, and an action after it."""

    def __init__(self, loader: Loader, action: Action) -> None:
        self._loader, self._action = loader, action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the module's own loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then the action."""
        self._loader.exec_module(module)
        self._action(module)
