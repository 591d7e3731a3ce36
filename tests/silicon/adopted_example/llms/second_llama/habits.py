"""None of the habits of the first model."""

# Records keep views of the pooled output buffers.
VIEWS = False
# The prompt length is recounted as the number of tokens that differ from end-of-text.
COUNT_EOS = False
# The layer outputs come from a second pass that pads with token 0.
ZERO_PAD_SECOND_PASS = False
# Prompts longer than the compiled length are cut.
CUT_SILENTLY = False
