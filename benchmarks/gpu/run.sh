#!/usr/bin/env bash
# The run book for a machine with a GPU: sets up, then runs the steps of benchmarks/gpu/run.py.
#
#   bash benchmarks/gpu/run.sh [--minutes 45] [--out build/gpu/cuda.json] [--only STEP ...] [--device simulate]
#
# Run it again to go on where the time ran out. Environment:
#   PYTHON   a Python 3.10-3.12 with a CUDA build of torch 2.8-2.11 (default: python3)
#   WHEELS   a folder of wheels, for a machine without a network; then nothing is downloaded. wheels.sh makes one for
#            Python 3.12. Add what PYTHON lacks of lightning, torchmetrics, transformers, tokenizers, safetensors, scipy,
#            rich, matplotlib, opt-einsum and six.
#   SITE     where packages go (default: a new folder under /tmp)
# nvFuser is for Python 3.10 and 3.12. Without it, all runs use thunder_mem's pointwise executor (Inductor), and the
# JSON says so.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-python3}
site=${SITE:-$(mktemp -d /tmp/thunder_mem_gpu.XXXX)}
nvfuser=nvfuser-cu130-torch210==0.2.36.dev20260301
install=("$python" -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --upgrade --target "$site")
needed='import thunder, litgpt, lightning, jsonargparse, transformers, scipy, rich, matplotlib'

if [ -n "${WHEELS:-}" ]; then
    "${install[@]}" --no-index "$WHEELS"/*.whl
elif ! "$python" -c "$needed" 2>/dev/null; then
    # No dependencies of theirs: pip would bring another torch. What is missing is named by the import below.
    "${install[@]}" lightning-thunder==0.2.6 litgpt==0.5.13 "lightning>=2.4,<3" lightning-utilities torchmetrics \
        jsonargparse docstring-parser typeshed-client looseversion dill opt-einsum optree astunparse six wheel \
        importlib-resources tokenizers safetensors "scipy<2" "rich<16" "matplotlib<4" || true
    "${install[@]}" "$nvfuser" || echo "no nvFuser wheel for this Python: going on without"
fi
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
# This package is imported from the tree, but its version is asked of an installed one.
"$python" -c 'import importlib.metadata as m; m.version("thunder-mem")' 2>/dev/null || "${install[@]}" "$root"
export PYTHONPATH="$root:$PYTHONPATH"
"$python" -c 'import thunder, litgpt, lightning, jsonargparse, scipy, rich, torch; print("torch", torch.__version__)'

# A slim wheel of nvFuser (wheels.sh) takes CUDA's libraries of torch.
cuda=$("$python" -c 'import os, nvidia.cu13 as n; print(os.path.join(list(n.__path__)[0], "lib"))' 2>/dev/null || true)
for libs in "$site"/nvfuser*.libs; do
    [ -d "$libs" ] && [ -n "$cuda" ] || continue
    for pair in libnvrtc-a49e67e8.so.13.0.88:libnvrtc.so.13 libcudart-96c42e41.so.13.0.96:libcudart.so.13 \
        libcupti-e2f9ed86.so.2025.3.1:libcupti.so.13; do
        [ -e "$libs/${pair%%:*}" ] || ln -sfn "$cuda/${pair##*:}" "$libs/${pair%%:*}"
    done
    export LD_LIBRARY_PATH="$cuda${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
done
# The wheel was built for torch 2.10: beside 2.11 one of its symbols needs a stand-in.
if "$python" -c 'import importlib.util as u, sys, torch
sys.exit(u.find_spec("nvfuser_direct") is None or torch.__version__ < "2.11")'; then
    shim=$site/libnvfuser_shim.so
    if g++ -std=c++17 -O1 -shared -fPIC "$here/nvfuser_torch211_shim.cpp" -o "$shim"; then
        preload=$shim${LD_PRELOAD:+:$LD_PRELOAD}
        # Only if it helps: a preload that cannot be loaded would stop everything.
        if LD_PRELOAD=$preload "$python" -c 'import nvfuser_direct'; then export LD_PRELOAD=$preload; fi
    fi
fi
case $python in */*) python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python") ;; esac
cd "$root"
exec "$python" -m benchmarks.gpu.run "$@"
