"""Floodplain inside vLLM: our policies decide its steps, and its KV swaps to our swap space. See docs/design/009.

vLLM loads ``scheduler.FloodplainScheduler`` and ``connector.FloodplainConnector``. Every name of vLLM that is not
declared stable is in ``compat``; the rest here is ours, and most of it is tested without vLLM.
"""
