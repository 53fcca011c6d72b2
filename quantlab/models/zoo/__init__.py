"""Small hybrid models in real architectures, trained by this project and shipped in the package.

`ZOO[name].path` is the checkpoint's directory. Training is in `quantlab.models.zoo.train`.
"""

from quantlab.models.zoo.recipe import TRAINABLE, ZOO, ZooModel

__all__ = ["TRAINABLE", "ZOO", "ZooModel"]
