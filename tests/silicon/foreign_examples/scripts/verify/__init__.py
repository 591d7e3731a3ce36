"""The verifier's records, under a name that others have, too."""

from collections import namedtuple

PrefillRecord = namedtuple(
    "PrefillRecord", "layer_intermediates final_hidden_normed logits_at_pred top1_token"
)
DecodeStepRecord = namedtuple("DecodeStepRecord", "lm_head_logits top1_token")
