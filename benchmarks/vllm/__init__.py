"""vLLM alone, with its own example connector, with LMCache and with Tiercel, in one run on one machine."""
