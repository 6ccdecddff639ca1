#!/usr/bin/env bash
# Trains a small GPT on the Python standard library's own sources, over two pipeline stages of two
# model chunks each. On two CPU cores it takes about three minutes; with GPUs it runs there.
#
#   ITERATIONS=300 examples/gpt/train_stdlib.sh [any flag of pretrain_gpt.py]
#   ITERATIONS=30 make train ARGS="--lr 1e-3"
#
# PYTHON is the interpreter, RUN_DIR the folder that takes dataset, logs and picture.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
run=${RUN_DIR:-runs/train_stdlib}
iterations=${ITERATIONS:-300}

gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
stages=2
if [ "$gpus" = 1 ]; then
  stages=1  # NCCL takes one rank per GPU
fi
pipeline=(--pipeline-model-parallel-size "$stages")
if [ "$stages" = 2 ]; then
  pipeline+=(--num-layers-per-virtual-pipeline-stage 1)
fi
echo "Training on $([ "$gpus" = 0 ] && echo "the CPU" || echo "$gpus GPU(s)"): $stages pipeline stage(s), $iterations iterations."

"$python" tools/stdlib_dataset.py --output "$run/data"
rm -rf "$run/tensorboard"
export OMP_NUM_THREADS=1 CUDA_DEVICE_MAX_CONNECTIONS=1
"$python" -m torch.distributed.run --standalone --nproc-per-node "$stages" pretrain_gpt.py \
  "${pipeline[@]}" \
  --num-layers 4 --hidden-size 128 --ffn-hidden-size 352 --num-attention-heads 4 \
  --seq-length 128 --max-position-embeddings 128 --position-embedding-type rope \
  --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights \
  --attention-dropout 0 --hidden-dropout 0 --transformer-impl local --no-persist-layer-norm \
  --no-gradient-accumulation-fusion \
  --micro-batch-size 4 --global-batch-size 16 --train-iters "$iterations" \
  --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 20 --clip-grad 1.0 \
  --tokenizer-type ByteLevelTokenizer --make-vocab-size-divisible-by 2 \
  --data-path "$run/data/stdlib_text_document" --split 969,30,1 \
  --eval-interval 100 --eval-iters 5 --log-interval 1 \
  --tensorboard-dir "$run/tensorboard" --tensorboard-log-interval 1 --distributed-timeout-minutes 5 \
  "$@" 2>&1 | "$python" tools/follow_training.py "$run/train.log"

"$python" tools/report.py "$run/tensorboard" --stats "$run/data/stats.json" --output "$run/loss.png" \
  --require-below-unigram
echo "TensorBoard: $python -m tensorboard.main --logdir $run/tensorboard"
