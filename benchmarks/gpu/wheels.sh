#!/usr/bin/env bash
# Wheels for a machine with a GPU, Python 3.12 and torch 2.11, but no network: bash benchmarks/gpu/wheels.sh [FOLDER]
#
# They take 40 MB; wheels that are in the folder already go. Of nvFuser's wheel (80 MB) symbols of debuggers are removed,
# and CUDA's own libraries, of which run.sh takes torch's. Then, there: WHEELS=FOLDER bash benchmarks/gpu/run.sh
set -euo pipefail
folder=$(mkdir -p "${1:-.whl}" && cd "${1:-.whl}" && pwd)
root=$(cd "$(dirname "$0")/../.." && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
download=(python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp
    --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64)
rm -f "$folder"/*.whl
"${download[@]}" -d "$folder" lightning-thunder==0.2.6 litgpt==0.5.13 jsonargparse==4.41.0 "mpmath<1.4" docstring-parser \
    typeshed-client importlib-resources lightning-utilities looseversion dill optree astunparse
git -C "$root" archive --prefix=tree/ HEAD | tar x -C "$scratch"  # a build in the tree itself takes what is stale there
python3 -m pip wheel --quiet --no-deps -w "$folder" "$scratch/tree"
"${download[@]}" -d "$scratch" nvfuser-cu130-torch210==0.2.36.dev20260301
wheel=$(cd "$scratch" && echo nvfuser*.whl)
python3 -m zipfile -e "$scratch/$wheel" "$scratch/files"
rm "$scratch"/files/*.libs/libnvrtc-* "$scratch"/files/*.libs/libcupti-* "$scratch"/files/*.libs/libcudart-*
find "$scratch/files" -name '*.so*' -exec strip --strip-unneeded {} +
(cd "$scratch/files" && python3 -m zipfile -c "$folder/$wheel" ./*)
du -ch "$folder"/*.whl | tail -1
