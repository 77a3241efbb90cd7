"""``vllm bench serve``, unchanged. The ``vllm`` command does not start where the distribution has another name."""

from __future__ import annotations

import argparse

from vllm.benchmarks.serve import add_cli_args, main

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args())
