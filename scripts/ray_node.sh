#!/usr/bin/env bash
# This machine as one node of a Ray cluster, in the foreground until it is ended:
#
#   bash scripts/ray_node.sh head FILE [ray start's options]          writes host:port to FILE once others may join
#   bash scripts/ray_node.sh worker HOST:PORT [ray start's options]
#
# RAY_AUTH_TOKEN_PATH names the file with the cluster's token. MEGARL_NODE_ADDRESS, or the network MEGARL_INTERFACE, says
# what this node is known by; MEGARL_GPUS_PER_NODE how many GPUs it gives, unless it is all; MEGARL_RAY_DIR where Ray's
# sockets and logs lie, on a disk of the node, in place of /tmp.
source "$(dirname "${BASH_SOURCE[0]}")/launch_env.sh"

FIRST_PORT=20000 LAST_PORT=32000 # below those that the kernel gives to connections

own_address() {
    local name=${SLURMD_NODENAME:-$(hostname)}
    if [[ -n ${MEGARL_NODE_ADDRESS:-} ]]; then
        printf '%s\n' "$MEGARL_NODE_ADDRESS"
    elif [[ -n ${MEGARL_INTERFACE:-} ]]; then
        ip -4 -o address show dev "$MEGARL_INTERFACE" | awk '{ sub("/.*", "", $4); print $4; exit }'
    else # some systems list their own name as loopback, which no other node reaches
        { getent ahostsv4 "$name" && hostname -I | tr ' ' '\n'; } |
            awk 'NF && $1 != "127.0.0.1" && $1 != "127.0.1.1" { print $1; exit }'
    fi
}

num_gpus() {
    local count=${MEGARL_GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}
    [[ -n $count ]] || count=$(nvidia-smi --list-gpus 2>/dev/null | wc -l) || count=0
    printf '%s\n' "$count"
}

# Ray takes port 10001 for its client server and ends where that is taken, as by another job of this node.
free_port() {
    local port=$((FIRST_PORT + (${SLURM_JOB_ID:-$$} % (LAST_PORT - FIRST_PORT))))
    while (: <"/dev/tcp/$1/$port") 2>/dev/null; do
        ((port = port < LAST_PORT ? port + 1 : FIRST_PORT))
    done
    printf '%s\n' "$port"
}

[[ $# -ge 2 && $1 =~ ^(head|worker)$ ]] || stop "usage: ray_node.sh head FILE | worker HOST:PORT [ray start's options]"
role=$1 meets=$2
shift 2
[[ -n ${RAY_AUTH_TOKEN:-} || -r ${RAY_AUTH_TOKEN_PATH:-} ]] ||
    stop "RAY_AUTH_TOKEN_PATH names no file with the cluster's token: whoever reaches a Ray without one may run code"
address=$(own_address)
[[ -n $address ]] || stop "this node has no address but loopback: set MEGARL_NODE_ADDRESS or MEGARL_INTERFACE"

export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
export RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1 # an engine takes several GPUs: its process picks them by slot
gpus=$(num_gpus)
((gpus > 0)) || stop "this node has no GPU: MEGARL_GPUS_PER_NODE says how many it is to give all the same"
folder=$(mktemp -d "${MEGARL_RAY_DIR:-/tmp}/megarl-ray-XXXXXX") # short: the path of a Unix socket has 107 bytes
# megarl asks for GPUs alone, and Ray starts an idle process for each CPU that it is told of.
options=(--block --node-ip-address="$address" --num-gpus="$gpus" --num-cpus="$gpus" --temp-dir="$folder"
    --min-worker-port=0 --max-worker-port=0 --disable-usage-stats)
if [[ $role == head ]]; then
    options+=(--head --port=0 --ray-client-server-port="$(free_port "$address")" --include-dashboard=false)
else
    options+=(--address="$meets")
fi

say "Ray on $address gives $gpus GPUs"
ray start "${options[@]}" "$@" >"$folder/start.log" 2>&1 &
ray=$!
is_ended=''
trap '((signals += 1)); is_ended=1; kill -TERM "$ray" 2>/dev/null || true' TERM INT HUP

if [[ $role == head ]]; then
    until [[ -s $folder/ray_current_cluster ]] || ! kill -0 "$ray" 2>/dev/null; do sleep 0.1; done
    if [[ -s $folder/ray_current_cluster ]]; then # under its name only when it is whole
        cp "$folder/ray_current_cluster" "$meets.partial"
        mv "$meets.partial" "$meets"
    fi
fi

await_end "$ray"
if [[ -n $is_ended ]]; then
    rm -rf "$folder"
else
    tail -n 3 "$folder/start.log"
    say "Ray ended on $address (exit code $code); what it wrote is in $folder there"
fi
exit "$code"
