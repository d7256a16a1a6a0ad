"""The engine's own state machines, run by seed against everything that can happen to them.

`python -m` puts the checkout first on the path, where `aioengine/` lacks its compiled parts: the installed one wins.
"""

import sys
from pathlib import Path

_ROOT = str(Path(__file__).parents[2])
if "aioengine" not in sys.modules and sys.path and sys.path[0] == _ROOT:
    sys.path.append(sys.path.pop(0))
