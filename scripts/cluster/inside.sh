#!/bin/sh
# Runs a command in a Debian tree: `inside.sh TREE SOURCE=TARGET… -- COMMAND…`. Must be the first
# process of its own mount and PID namespaces, so that all processes it starts end with it.
# The tree becomes the root; each SOURCE of the machine is mounted at TARGET.
set -eu
tree=$1
shift

mount --bind "$tree" "$tree"
mount -t proc proc "$tree/proc"
mount --rbind /sys "$tree/sys"
mount --rbind /dev "$tree/dev"
mount -t tmpfs tmpfs "$tree/run"
mount -t tmpfs tmpfs "$tree/tmp"
while [ "$1" != -- ]; do
    source=${1%%=*} target=$tree${1#*=}
    if [ -d "$source" ]; then
        mkdir -p "$target"
    else
        mkdir -p "$(dirname "$target")"
        [ -e "$target" ] || : > "$target"
    fi
    mount --bind "$source" "$target"
    shift
done
shift

# A chroot is not enough: entering a container enters the root of its mount namespace, which would
# still be the machine's.
cd "$tree"
pivot_root . mnt
exec chroot . /bin/sh -c 'umount -l /mnt && exec "$@"' sh "$@"
