#!/usr/bin/env bash
# Wheels for a machine with a GPU, Python 3.12 and torch 2.11, but no network: bash benchmarks/gpu/wheels.sh [FOLDER]
#
# They take 40 MB. Of nvFuser's wheel (80 MB) symbols of debuggers are removed, and CUDA's own libraries, of which
# run.sh takes torch's. Then, there: WHEELS=FOLDER bash benchmarks/gpu/run.sh
set -euo pipefail
folder=$(mkdir -p "${1:-.whl}" && cd "${1:-.whl}" && pwd)
root=$(cd "$(dirname "$0")/../.." && pwd)
download=(python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp
    --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64)
"${download[@]}" -d "$folder" lightning-thunder==0.2.6 litgpt==0.5.13 jsonargparse==4.41.0 "mpmath<1.4" docstring-parser \
    typeshed-client importlib-resources lightning-utilities looseversion dill optree astunparse
python3 -m pip wheel --quiet --no-deps -w "$folder" "$root"
slim=$(mktemp -d)
trap 'rm -rf "$slim"' EXIT
"${download[@]}" -d "$slim" nvfuser-cu130-torch210==0.2.36.dev20260301
wheel=$(basename "$slim"/*.whl)
python3 -m zipfile -e "$slim/$wheel" "$slim/files"
rm "$slim"/files/*.libs/libnvrtc-* "$slim"/files/*.libs/libcupti-* "$slim"/files/*.libs/libcudart-*
find "$slim/files" -name '*.so*' -exec strip --strip-unneeded {} +
rm -f "$folder/$wheel"
(cd "$slim/files" && python3 -m zipfile -c "$folder/$wheel" ./*)
du -ch "$folder"/*.whl | tail -1
