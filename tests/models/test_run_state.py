"""The state that a run begins with, and what is refused before it is made."""

import pytest

from models.candidate import Candidate
from models.command import error_message
from models.decoder.config import ExpertsConfig
from models.decoder.decoder import Decoder
from models.qwen3 import Qwen3MoeConfig
from models.run_config import LmRunConfig
from stacked_remat.training import (
    MeshConfig,
    TrainerConfig,
    UpdateConfig,
)

MODEL = Qwen3MoeConfig(
    hidden_dim=8, num_layers=3, num_heads=2, num_kv_heads=1, experts=ExpertsConfig(2, 1, 4)
)


@pytest.mark.parametrize("fused", [False, True])
def test_errors_of_a_model_are_not_errors_of_its_config(monkeypatch, standard_promotion, fused):
    """They keep their class, and a command shows their traceback."""

    def broken(self, *args, **kwargs):
        raise ValueError("operands do not fit")

    monkeypatch.setattr(Decoder, "hidden_states", broken)
    trainer = TrainerConfig(update=UpdateConfig(fused=fused), mesh=MeshConfig(axes={"data": 1}))
    config = LmRunConfig(model=MODEL, vocab_size=11, trainer=trainer)
    with pytest.raises(ValueError, match="operands do not fit") as raised:
        Candidate(config).check_applies()
    assert type(raised.value) is ValueError and error_message(raised.value) is None
