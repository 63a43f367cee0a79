"""Pairs of source and target: what the decoder of an encoder-decoder reads for its labels."""

import pytest
import torch

from headprune.errors import CheckpointError
from headprune.model.batch import decoder_inputs
from tests import tiny

SOURCE = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 1]])
LABELS = torch.tensor([[12, 13, 14], [15, 3, -100]])


@pytest.mark.parametrize("case", ["bart", "t5", "marian", "m2m_100", "blenderbot"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_decoder_reads_what_the_model_makes_of_labels(case, dtype):
    """Some models have a function for it, and some (M2M-100, Blenderbot) do it inside."""
    model = tiny.model(case, dtype)
    wanted = model(input_ids=SOURCE, labels=LABELS).logits
    read = decoder_inputs(model, LABELS)
    assert torch.equal(model(input_ids=SOURCE, decoder_input_ids=read).logits, wanted)
    other = read.roll(1, 1)
    assert not torch.equal(model(input_ids=SOURCE, decoder_input_ids=other).logits, wanted)


def test_a_config_without_a_first_token_is_refused():
    model = tiny.model("m2m_100")
    model.config.decoder_start_token_id = None
    with pytest.raises(CheckpointError, match="has no decoder_start_token_id"):
        decoder_inputs(model, LABELS)
