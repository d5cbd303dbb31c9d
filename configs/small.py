"""0.8 million parameters: two to four minutes on two CPU cores.

The defaults, as they are.
"""

import ml_collections

from configs import default


def get_config() -> ml_collections.ConfigDict:
    return default.get_config()
