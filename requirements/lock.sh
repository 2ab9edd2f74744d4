#!/bin/sh
# Renews the two lock files from the .in files beside them; needs uv (pip install uv).
# A pin stays unless it contradicts the others: to move one, delete its line first.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# uv takes the environments to lock for from a pyproject.toml alone.
cat >"$work/pyproject.toml" <<'END'
[tool.uv]
environments = [
  "sys_platform == 'linux' and platform_machine == 'x86_64' and implementation_name == 'cpython' and python_full_version < '3.14'",
]
END

# lock NAME [UV OPTION...]: the comments of NAME.txt and its torch pin stay; markers that always
# hold in those environments go.
lock() {
    name=$1
    shift
    cp "$here/$name.txt" "$work/$name.txt"
    (cd "$work" && uv pip compile --quiet --universal --python-version 3.10 \
        --no-header --no-annotate "$@" "$here/$name.in" --output-file "$name.txt")
    {
        grep -E '^#|^torch==' "$here/$name.txt"
        sed -E \
            -e "s/ ;.*(python_full_version >= '[0-9.]+').*/ ; \1/" \
            -e "s/ ; (python_full_version < '3\.1[0-3][0-9.]*') .*/ ; \1/" \
            -e "s/ ; python_full_version < '3\.14'.*//" "$work/$name.txt"
    } >"$work/done.txt"
    cp "$work/done.txt" "$here/$name.txt"
}

lock vllm-omni-0.30-cpu --override "$here/overrides.txt"
lock dev --constraint "$here/vllm-omni-0.30-cpu.txt"
