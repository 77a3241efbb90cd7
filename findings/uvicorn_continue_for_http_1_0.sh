#!/usr/bin/env bash
# uvicorn answers a request of HTTP/1.0 that has "Expect: 100-continue" with an interim response, 100 Continue.
# Expected: none. RFC 9110, 10.1.1: a server that receives the expectation in an HTTP/1.0 request ignores it, because
# such a client takes the first status line for the answer. Its parser httptools does it, its parser h11 does not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check uvicorn==0.54.0 httptools==0.9.0 h11==0.16.0
timeout 60 "$folder/venv/bin/python" - <<'PYTHON'
import asyncio, importlib.metadata, socket, sys, uvicorn

SENT = b"POST / HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nhi"

async def app(scope, receive, send):
    if scope["type"] == "http":
        body = (await receive())["body"]
        head = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": body})

async def first_line(parser):
    sock = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, http=parser, lifespan="off", log_config=None))
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    while not server.started:
        await asyncio.sleep(0)
    reader, writer = await asyncio.open_connection(*sock.getsockname())
    writer.write(SENT)
    line = (await reader.readline()).decode().strip()
    writer.close()
    server.should_exit = True
    await serving
    return line

print("uvicorn", importlib.metadata.version("uvicorn"))
seen = {parser: asyncio.run(first_line(parser)) for parser in ("httptools", "h11")}
for parser, line in seen.items():
    print(f"{parser}: expected first line: HTTP/1.1 200 OK; seen: {line}")
sys.exit(seen != {"httptools": "HTTP/1.1 100 Continue", "h11": "HTTP/1.1 200 OK"})
PYTHON
