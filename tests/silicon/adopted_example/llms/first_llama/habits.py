"""Habits of deployed examples, each with a switch."""

# Records keep views of the pooled output buffers.
VIEWS = True
# The prompt length is recounted as the number of tokens that differ from end-of-text.
COUNT_EOS = True
# The layer outputs come from a second pass that pads with token 0.
ZERO_PAD_SECOND_PASS = True
# Prompts longer than the compiled length are cut.
CUT_SILENTLY = True
