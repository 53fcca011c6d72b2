"""The Triton scan on the op inputs of a model whose channels live from 1 to 640,000 tokens."""

import pytest
import torch

from quantlab.models import OpCall, forward_hidden, load_model, new_cache, replaced
from quantlab.recurrence import exact_scan
from quantlab.replay import parse_policy
from tests.kernels.device import MARKS
from tests.kernels.test_scan import PROMPT, check_windows
from tests.models.small_kda import save_small_kda

pytestmark = MARKS


@pytest.fixture(scope="module")
def layers(tmp_path_factory):
    """Op inputs of every recurrent layer, [1, PROMPT + 32] tokens."""
    path = tmp_path_factory.mktemp("kda")
    save_small_kda(path)
    m = load_model(str(path), dtype=torch.float32)
    found = {}

    def keep(call: OpCall):
        found[call.layer] = call.inputs
        return exact_scan(call.inputs)

    ids = torch.randint(3, 259, (1, PROMPT + 32), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode(), replaced(m, keep):
        forward_hidden(m, ids, cache=new_cache(m))
    return [found[i] for i in range(m.layers)]


# Not FP16: fast channels hold values of 1e-4 of the largest, of whose FP16 steps the noise of other
# orders is several percent.
@pytest.mark.parametrize("policy", ["shared:fp32", "shared:nvfp4-sr", "fp8 / fp32"])
def test_windows_of_a_model_with_channels_of_all_speeds(layers, policy):
    lives = torch.cat([-0.6931 / x.log_decay.mean((0, 1)) for x in layers])
    assert lives.min() < 3 and lives.max() > 300_000
    for inputs in layers:
        assert inputs.per_channel
        check_windows(parse_policy(policy), inputs, 2)
