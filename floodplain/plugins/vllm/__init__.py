"""Floodplain inside vLLM: our policies decide its steps, and its KV swaps to our swap space (docs/design/009).

vLLM loads ``scheduler.FloodplainScheduler`` and ``connector.FloodplainConnector``. Every name of vLLM that is not
declared stable is in ``compat`` and ``compat_*``.
"""
