"""Floodplain inside vLLM: our policies decide its steps, and its KV leaves for our swap space. See docs/design/009.

``scheduler.FloodplainScheduler`` and ``connector.FloodplainConnector`` are what vLLM loads. Every name of vLLM that is
not declared stable stands in ``compat``; the rest here is ours, and most of it is tested without vLLM.
"""
