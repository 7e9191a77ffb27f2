#!/usr/bin/env bash
# ./run.sh [--name=value ...]           set up, get the data, train on what this machine has
# ./run.sh FILE ... [--name=value ...]  the same on your own text: files, folders, .jsonl
# ./run.sh test [pytest args]           set up, lint, check the records, run the tests
set -euo pipefail

fail() { echo "run.sh: $*" >&2; exit 2; }

# 1. What was asked for: texts, how to read them (for data/prepare.py), and keys of the trainer.
here=$(CDPATH= cd -- "$(dirname "$(readlink -f -- "$0")")" && pwd)
texts=() reading=() keys=() last=
if [ "${1:-}" != test ]; then
  for word in "$@"; do
    case $word in
      --key=* | --split=* | --split_blank=* | --tokens=* | --bytes | --out=*) reading+=("$word") ;;
      -*) keys+=("$word") ;;
      *)
        [ "$last" != --resume ] || fail "write --resume=$word"
        [ -e "$word" ] || fail "'$word': no such file or folder; options are written --name=value"
        case $word in /*) ;; *) word=$PWD/$word ;; esac
        texts+=("$word") ;;
    esac
    last=$word
  done
fi
[ "$PWD" = "$here" ] || echo "run.sh: paths in what follows are relative to $here"
cd "$here"

# 2. An environment of its own. On GPUs it has the version of torch that the figures are from.
need=(requirements.txt)
nvidia-smi > /dev/null 2>&1 && need=(requirements-gpu.txt)
[ "${1:-}" = test ] && need+=(requirements-dev.txt)
python=.venv/bin/python
if ! [ -e .venv/bin/activate ]; then
  base=${PYTHON:-python3}
  "$base" -c "import sys; sys.exit(sys.version_info < (3, 11))" 2> /dev/null ||
    fail "$base is too old or missing; name Python 3.11 or newer: PYTHON=python3.12 ./run.sh"
  echo "run.sh: making a virtual environment in .venv (once)"
  "$base" -m venv .venv || fail "no virtual environment could be made in .venv; see above"
fi
"$python" -c "" || fail "$python does not run; remove .venv and start again"
for list in "${need[@]}"; do
  if ! cmp -s "$list" ".venv/installed-$list"; then
    echo "run.sh: installing $list"
    # --no-compile: pip would compile every file, for most of a minute.
    "$python" -m pip install --quiet --no-compile --disable-pip-version-check -r "$list" ||
      fail "$list could not be installed (see above); mend that, and start it again"
    cp "$list" ".venv/installed-$list"
  fi
done
"$python" -c "import numpy, safetensors, tqdm" 2> /dev/null ||
  fail ".venv lacks its packages, perhaps since Python was upgraded; remove .venv and start again"

if [ "${1:-}" = test ]; then
  shift
  "$python" -m ruff check .
  "$python" -m records check
  exec "$python" -m pytest -q -n 2 --dist worksteal tests "$@"
fi

# 3. The data. Wrong keys, and values out of range, are found before data is made or fetched.
asked=" ${keys[*]-} "
case $asked in
  *" --help "* | *" -h "*) exec "$python" train_gpt.py "${keys[@]}" ;;
esac
"$python" train_gpt.py ${keys[@]+"${keys[@]}"} --help > /dev/null
# Ctrl-C ends this command at once, too, without a traceback.
gpus=$("$python" -c "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL)
import torch; print(torch.cuda.device_count())")
case $asked in *" --preset=laptop "* | *" --device=cpu "*) gpus=0 ;; esac
tokens=gpt2
[ "$gpus" = 0 ] && tokens=bytes
case $asked in
  *" --preset=laptop "* | *" --preset=char "*) tokens=bytes ;;
  *" --preset="*) tokens=gpt2 ;;
esac
if [ ${#texts[@]} -gt 0 ]; then
  case $asked in *" --data_dir="*) fail "leave out --data_dir or your own text" ;; esac
  folder=$("$python" data/prepare.py "${texts[@]}" --tokens=$tokens --print_folder \
    ${reading[@]+"${reading[@]}"})
  keys=(--fit "--data_dir=$folder" ${keys[@]+"${keys[@]}"})
else
  [ ${#reading[@]} = 0 ] || fail "${reading[*]} says how to read a text, but no text is given"
  case $asked in
    *" --data_dir="* | *" --resume"*) ;;  # a save names its data
    *)
      if [ $tokens = bytes ]; then
        "$python" data/prepare.py --python-docs
      elif [ "$gpus" = 0 ]; then
        fail "this preset is for FineWeb and a GPU; leave out --preset, or give a text of your own"
      else
        "$python" data/fineweb.py 9
      fi ;;
  esac
fi

# 4. Train.
[ "$gpus" -le 1 ] && exec "$python" train_gpt.py ${keys[@]+"${keys[@]}"}
exec "$python" -m torch.distributed.run --standalone --nproc_per_node="$gpus" train_gpt.py \
  ${keys[@]+"${keys[@]}"}
