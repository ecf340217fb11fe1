"""Where vLLM is touched: one file per hook, each handed a module that the server has imported."""
