#!/usr/bin/env bash
# Checks the calls of cuDNN against the library itself, without a GPU: descriptors and graphs, and
# engines, plans and workspaces for a described H200.
#
#   tests/cudnn.sh [VERSION]    cuDNN 9.8 or later; 9.19.0.56 by default, which is PyTorch 2.11's
#
# It downloads about 0.9 GB from PyPI into target/cudnn-tools, once, so CI does not run it.
set -euo pipefail
cd "$(dirname "$0")/.."
version=${1:-9.19.0.56}
folder=target/cudnn-tools/$version
if [ ! -d "$folder" ]; then
    python3 -m pip install -q --no-deps --target "$folder.part" "nvidia-cudnn-cu13==$version" nvidia-cublas==13.10.0.20
    mv "$folder.part" "$folder"
fi
export LD_LIBRARY_PATH="$PWD/$folder/nvidia/cudnn/lib:$PWD/$folder/nvidia/cu13/lib:${LD_LIBRARY_PATH:-}"
FORETELL_REQUIRE_CUDNN=1 cargo test -q -p foretell-kernels --lib library::cudnn::tests::library -- --nocapture
