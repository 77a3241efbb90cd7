"""Run by the Python of .venv-clients: llama.cpp's ids of the texts on standard input, by its server's /tokenize."""

from __future__ import annotations

import http.client
import json
import os
import sys

import xllamacpp


def main() -> None:
    """Print one list of ids for each text of the JSON list on standard input."""
    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.n_ctx = params.n_batch = 64
    params.n_parallel = params.cpuparams.n_threads = 1
    params.warmup, params.verbosity, params.port = False, 0, 0
    server = xllamacpp.Server(params)
    connection = http.client.HTTPConnection(server.listening_address.removeprefix("http://"))
    found = []
    for text in json.load(sys.stdin):
        body = json.dumps({"content": text, "add_special": True, "parse_special": True})
        connection.request("POST", "/tokenize", body, {"Content-Type": "application/json"})
        found.append(json.loads(connection.getresponse().read())["tokens"])
    json.dump(found, sys.stdout)
    sys.stdout.flush()
    os._exit(0)  # the server's threads may not end when the interpreter does


if __name__ == "__main__":
    main()
