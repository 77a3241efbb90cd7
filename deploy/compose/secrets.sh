#!/usr/bin/env bash
# Writes the secrets of compose.yaml into deploy/secrets, which git ignores: API keys and the coordinator's tokens.
set -euo pipefail
umask 077
folder="$(cd "$(dirname "$0")/.." && pwd)/secrets"
mkdir "$folder"
token() { head -c 24 /dev/urandom | base64 | tr '+/' '-_'; }
a=$(token) b=$(token)
{
    printf 'producer server-a %s\nconsumer server-a %s\n' "$a" "$a"
    printf 'producer server-b %s\nconsumer server-b %s\n' "$b" "$b"
    token # an admin's
} > "$folder/coordinator-tokens"
printf '%s\n' "$a" > "$folder/server-a-token"
printf '%s\n' "$b" > "$folder/server-b-token"
token > "$folder/api-keys"
echo "the API key is in $folder/api-keys"
