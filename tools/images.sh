#!/usr/bin/env bash
# tools/images.sh [FLAG...]: builds the image for CPUs with docker, podman or buildah, whichever is installed, and
# serves a tiny model in a container. Flags are the build's, such as --build-arg PYTHON=IMAGE. Run by make images.
set -euo pipefail
cd "$(dirname "$0")/.."
for tool in docker podman buildah; do
    if "$tool" info > /dev/null 2>&1; then break; fi
    tool=
done
[ -n "$tool" ] || { echo "install docker, podman or buildah; a Docker daemon must run" >&2; exit 2; }

"$tool" build --file deploy/Dockerfile --tag floodplain "$@" .
if [ "$tool" = buildah ]; then
    container=$(buildah from floodplain)
    trap 'buildah rm "$container" > /dev/null' EXIT
    enter=(buildah run "$container" --)
else
    "$tool" run --rm floodplain --version # by the image's own ENTRYPOINT, which buildah does not run
    enter=("$tool" run --rm --interactive --entrypoint "" floodplain)
fi
"${enter[@]}" floodplain --version
"${enter[@]}" python - < tools/serve_once.py
