#!/bin/sh
# A command in a Debian tree: `inside.sh TREE SOURCE=TARGET… -- COMMAND…`, to be run as the first
# process of mount and process namespaces of its own, so that whatever it starts ends with it.
# The tree becomes the root; each SOURCE of the machine is seen at TARGET.
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

# A chroot would not do: to enter a container is to enter the root of its mount namespace, which
# would still be the machine's.
cd "$tree"
pivot_root . mnt
exec chroot . /bin/sh -c 'umount -l /mnt && exec "$@"' sh "$@"
