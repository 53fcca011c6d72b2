"""Small hybrid models in real architectures, trained by this project and shipped in the package.

`SHIPPED[name].path` is the checkpoint's directory. Training is in `quantlab.models.zoo.train`.
"""

from quantlab.models.zoo.recipe import SHIPPED, TRAINABLE, ZOO, ZooModel

__all__ = ["SHIPPED", "TRAINABLE", "ZOO", "ZooModel"]
