"""Errors of reading a model's config.

InvalidInput
└── UnknownArchitecture     no rule says which layers of this model have a router
    ├── ContradictoryConfig two keys, or a list and the depth, say different things
    └── DenseModel          the config is understood: no layer has a router
"""

from sideband.errors import InvalidInput


class UnknownArchitecture(InvalidInput):
    """A model config that no rule knows; ``field`` names the key that was looked for."""


class ContradictoryConfig(UnknownArchitecture):
    """Two keys of a config exclude each other, so that any answer would be a guess."""


class DenseModel(UnknownArchitecture):
    """A model without a learned router: there is nothing to replay; ``field`` names the key."""
