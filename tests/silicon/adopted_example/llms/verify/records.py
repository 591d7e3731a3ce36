"""What a runner hands over."""

from dataclasses import dataclass, field


@dataclass
class PrefillRecord:
    layer_intermediates: list = field(default_factory=list)
    final_hidden_normed: object = None
    logits_at_pred: object = None
    top1_token: int = -1


@dataclass
class DecodeStepRecord:
    lm_head_logits: object
    top1_token: int
