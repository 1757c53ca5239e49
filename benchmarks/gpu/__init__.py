"""The engine and its kernels on a GPU."""

import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path

# Cases come from this checkout's tests/, a folder without an __init__. An installed package of that name,
# which some distributions leave in site-packages, would be found instead.
if "tests" not in sys.modules:
    _spec = ModuleSpec("tests", None, is_package=True)
    _spec.submodule_search_locations = [str(Path(__file__).parents[2] / "tests")]
    sys.modules["tests"] = module_from_spec(_spec)
