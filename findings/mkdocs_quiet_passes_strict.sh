#!/usr/bin/env bash
# mkdocs build --strict fails for a link that leads nowhere, and passes for it with --quiet. Expected: --quiet changes what
# is printed, and not the exit status. (The strict mode counts messages of the log, and --quiet drops them before.)
# Exits with 0 as long as that is so.
set -euo pipefail
FOLDER=$(mktemp -d)
trap 'rm -rf "$FOLDER"' EXIT
python3 -m venv "$FOLDER/venv"
"$FOLDER/venv/bin/pip" install --quiet --disable-pip-version-check mkdocs==1.6.1 click==8.2.1
mkdir "$FOLDER/docs"
echo 'site_name: s' > "$FOLDER/mkdocs.yml"
echo '# A page without links' > "$FOLDER/docs/index.md"

build() {
    local status=0
    "$FOLDER/venv/bin/mkdocs" build --config-file "$FOLDER/mkdocs.yml" "$@" > "$FOLDER/log" 2>&1 || status=$?
    echo "$status"
}

sound="$(build --strict) $(build --strict --quiet)"
echo '[a link](nowhere.md)' >> "$FOLDER/docs/index.md"
broken="$(build --strict) $(build --strict --quiet)"
echo "$("$FOLDER/venv/bin/mkdocs" --version | cut -d' ' -f1-3): status of --strict, and of --strict --quiet:" \
    "sound page $sound, page with a broken link $broken"
[ "$sound" = "0 0" ] && [ "$broken" = "1 0" ]
