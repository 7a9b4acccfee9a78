#!/usr/bin/env bash
# This machine as one node of a Ray cluster, in the foreground until it is ended:
#
#   bash scripts/ray_node.sh head FILE [ray start's options]          writes host:port to FILE once others may join
#   bash scripts/ray_node.sh worker HOST:PORT [ray start's options]
#
# RAY_AUTH_TOKEN_PATH names the file with the cluster's token. MEGARL_NODE_ADDRESS, or the network MEGARL_INTERFACE, says
# what this node is known by; MEGARL_GPUS_PER_NODE how many GPUs it gives, unless it is all; MEGARL_RAY_DIR where Ray's
# sockets, logs and temporary files lie, on a disk of the node, in place of /tmp; MEGARL_OBJECT_STORE_BYTES how much memory
# Ray's objects may take. MEGARL_LOGS, a folder that all nodes see, gets this node's logs when it ends, if it is still there.
source "$(dirname "${BASH_SOURCE[0]}")/launch_env.sh"

FIRST_PORT=20000 LAST_PORT=32000 # below those that the kernel gives to connections
HEAD_S=900                       # for Slurm to notice that the first node of the job is dead

name=${SLURMD_NODENAME:-$(hostname)}
kept=${MEGARL_LOGS:+$MEGARL_LOGS/$name}
[[ -z $kept ]] || mkdir -p "$kept"

# Whoever waits for all nodes finds the reason there: srun does not end while other nodes of its step run.
note_failure() {
    [[ ! -d $kept ]] || { printf '%s: %s\n' "$name" "$1" >"$kept/.failed" && mv "$kept/.failed" "$kept/failed"; }
}

give_up() {
    note_failure "$1"
    stop "$1"
}

# One a line. Some systems list their own name as loopback, which no other node reaches.
own_addresses() {
    if [[ -n ${MEGARL_NODE_ADDRESS:-} ]]; then
        printf '%s\n' "$MEGARL_NODE_ADDRESS"
    elif [[ -n ${MEGARL_INTERFACE:-} ]]; then
        ip -4 -o address show dev "$MEGARL_INTERFACE" | awk '{ sub("/.*", "", $4); print $4; exit }'
    else
        getent ahostsv4 "$name" | awk '!/^127\.0\.[01]\.1 / { print $1; exit }' | grep . ||
            hostname -I | tr ' ' '\n' | awk '/^[0-9.]+$/ && !/^127\.0\.[01]\.1$/'
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

# The processes of this node's Ray that are still there, one a line: its folder is in the environment that they began with.
left_behind() {
    local wanted=TMPDIR=$folder/tmp
    local -x TMPDIR='' # grep and cut are not among them
    grep -lsxzF "$wanted" /proc/[0-9]*/environ | cut -d / -f 3
}

# A job that was submitted with --no-kill keeps its other nodes when the first one dies, where its script was: one of them
# has to queue it again. Every worker's Ray ends then; Slurm takes the dead node out of the job after its SlurmdTimeout.
queue_again_without_head() {
    local job=${SLURM_JOB_ID:-} names deadline=$((SECONDS + HEAD_S))
    [[ $role == worker && -n $job ]] && command -v scontrol >/dev/null || return 0
    while [[ -z $is_ended ]] && ((SECONDS < deadline)); do
        names=$(scontrol show hostnames "$(squeue --noheader --jobs="$job" --format=%N)" 2>/dev/null) || names=''
        if [[ -n $names ]] && ! grep -qxF "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)" <<<"$names"; then
            scontrol requeue "$job" || true
            return
        fi
        sleep 5 &
        wait $! || true # a signal ends it
    done
}

[[ $# -ge 2 && $1 =~ ^(head|worker)$ ]] || stop "usage: ray_node.sh head FILE | worker HOST:PORT [ray start's options]"
role=$1 meets=$2
shift 2
[[ $role == worker || $meets == /* ]] || meets=$CALLER/$meets
[[ -n ${RAY_AUTH_TOKEN:-} || -r ${RAY_AUTH_TOKEN_PATH:-} ]] ||
    give_up "RAY_AUTH_TOKEN_PATH names no file with the cluster's token: whoever reaches a Ray without one may run code"
address=$(own_addresses) || true
[[ -n $address ]] || give_up "this node has no address but loopback: set MEGARL_NODE_ADDRESS or MEGARL_INTERFACE"
[[ $address != *$'\n'* ]] ||
    give_up "this node has several addresses (${address//$'\n'/, }): set MEGARL_NODE_ADDRESS or MEGARL_INTERFACE"
[[ $address =~ ^[0-9]+\.[0-9]+\.[0-9]+\.[0-9]+$ ]] || give_up "MEGARL_NODE_ADDRESS is $address: write a numeric IPv4 address"

export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0 # Ray would wait half a minute for work that its driver has ended
export RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1 # an engine takes several GPUs: its process picks them by slot
# Above its threshold, 95 % of the host's memory, Ray kills the process that takes most: a training rank whose optimizer or
# checkpoint lies there by plan, and the run with it.
export RAY_memory_usage_threshold="${RAY_memory_usage_threshold:-0.99}"
# Of a node whose network is cut Ray would know after a minute, in which whoever needs what is stored there waits; so after 25 s.
export RAY_health_check_timeout_ms="${RAY_health_check_timeout_ms:-5000}" # of a check; there is one each 3 s
export RAY_health_check_failure_threshold="${RAY_health_check_failure_threshold:-3}"
gpus=$(num_gpus)
((gpus > 0)) || give_up "this node has no GPU: MEGARL_GPUS_PER_NODE says how many it is to give all the same"
listed=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ') || listed=0
((listed == 0 || listed >= gpus)) || give_up "this node is to give $gpus GPUs, and nvidia-smi lists $listed"
room=${MEGARL_RAY_DIR:-/tmp}
for left in "$room/megarl-${SLURM_JOB_ID:-none}"-*; do # by a life of this job that was killed here
    [[ ! -f $left/address || $(<"$left/address") != "$address" ]] || rm -rf "$left"
done
# Of mode 0700; Ray opens the folder that it is given to everyone, so that one lies inside. Short names: the path of a Unix
# socket has 107 bytes.
folder=$(mktemp -d "$room/megarl-${SLURM_JOB_ID:-ray}-XXXX")
sockets=$folder/r
printf '%s\n' "$address" >"$folder/address"
mkdir "$folder/tmp"
export TMPDIR=$folder/tmp # what a killed process leaves goes with the node's folder
store_bytes=$(awk '/^MemTotal/ { tenth = $2 * 102; most = 2 ^ 35; printf "%d", tenth < most ? tenth : most }' /proc/meminfo)
# megarl asks for GPUs alone, and Ray starts an idle process for each CPU that it is told of.
options=(--block --node-ip-address="$address" --num-gpus="$gpus" --num-cpus="$gpus" --temp-dir="$sockets"
    --object-store-memory="${MEGARL_OBJECT_STORE_BYTES:-$store_bytes}"
    --min-worker-port=0 --max-worker-port=0 --disable-usage-stats)
# By which megarl tells Slurm's name of a node from its address.
[[ ! $name =~ ^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$ ]] || options+=(--labels="megarl-node=$name")
if [[ $role == head ]]; then
    options+=(--head --port=0 --ray-client-server-port="$(free_port "$address")" --include-dashboard=false)
else
    options+=(--address="$meets")
fi

say "Ray on $address gives $gpus GPUs"
is_ended='' ray=''
trap '((signals += 1)); is_ended=1; [[ -z $ray ]] || kill -TERM "$ray" 2>/dev/null || true' TERM INT HUP
ray start "${options[@]}" "$@" >"$folder/start.log" 2>&1 &
ray=$!
[[ -z $is_ended ]] || kill -TERM "$ray" 2>/dev/null || true

if [[ $role == head ]]; then
    until [[ -s $sockets/ray_current_cluster ]] || ! kill -0 "$ray" 2>/dev/null; do sleep 0.1; done
    if [[ -s $sockets/ray_current_cluster ]]; then # under its name only when it is whole
        cp "$sockets/ray_current_cluster" "$meets.partial"
        mv "$meets.partial" "$meets"
    fi
fi

await_end "$ray"
has_failed='' # the job may end this node as soon as it reads the reason
if [[ -z $is_ended ]]; then
    has_failed=1
    reason="Ray ended (exit code $code), $(tail -n 1 "$folder/start.log")"
    note_failure "$reason"
    tail -n 3 "$folder/start.log"
fi
if [[ -d $kept ]]; then
    for log in "$sockets"/session_*/logs "$folder/start.log"; do # session_latest is a link to the session
        [[ -L ${log%/logs} || ! -e $log ]] || cp -r "$log" "$kept" || true
    done
fi
if [[ -z $has_failed || -d $kept ]]; then
    # A worker that was half way up when Ray ended would make the folder again.
    for ((try = 0; try < 50; ++try)); do
        mapfile -t left < <(left_behind)
        ((${#left[@]})) || break
        kill -KILL "${left[@]}" 2>/dev/null || true
        sleep 0.1
    done
    rm -rf "$folder" || true
fi
if [[ -n $has_failed ]]; then
    where="in $folder there"
    [[ ! -d $kept ]] || where="in $kept"
    say "Ray ended on $address (exit code $code); what it wrote is $where"
    queue_again_without_head
fi
exit "$code"
