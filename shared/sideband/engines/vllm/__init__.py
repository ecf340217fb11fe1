"""The vLLM plugin: rows of stock vLLM by handle, without a fork and without another flag.

``plugin.register`` is the entry point; ``hooks`` holds one file per place where vLLM is touched.
All else decides without vLLM: which version is known, what a request asks for, what is taken off
its results, what is written and what is answered. Nothing here imports vllm; the hooks get its
modules handed in when the server has imported them.
"""
