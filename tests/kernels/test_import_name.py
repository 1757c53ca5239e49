from __future__ import annotations

import pytest

from tests.conftest import ROOT, run_python


@pytest.mark.slow
@pytest.mark.parametrize(
    "statement",
    [
        "from transformers import LlamaForCausalLM",
        "import pagemill.kernels, sys; assert 'torch' not in sys.modules",
    ],
)
def test_folder_does_not_pass_for_the_package_of_the_same_name(statement: str) -> None:
    """transformers looks for a distribution called `kernels` and, from the repository root, finds Pagemill's folder."""
    run = run_python("-c", statement, cwd=ROOT)
    assert run.returncode == 0, run.stderr
