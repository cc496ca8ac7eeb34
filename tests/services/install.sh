#!/usr/bin/env bash
# Installs the server that tests start by themselves, where it is missing: PostgreSQL, from Debian's packages. Nothing of
# it is left running.
set -euo pipefail

missing=()
compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null || command -v postgres >/dev/null || missing+=(postgresql)
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "test-services needs ${missing[*]}: install it, or run this as root on Debian or Ubuntu" >&2
    exit 1
fi
echo "installing ${missing[*]}"
# Debian starts what it installs, unless this file says no.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
    trap 'rm -f $policy' EXIT
    printf '#!/bin/sh\nexit 101\n' >$policy
    chmod +x $policy
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
