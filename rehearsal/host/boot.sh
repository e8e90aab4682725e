#!/bin/sh
# First process of a rehearsal host: makes the container look like a machine to systemd, then becomes systemd.
set -eu

# Units with LoadCredential= get their credentials by a mount; from a container's private mounts it never arrives.
mount --make-rshared /

# The kernel's boot id is the controller's: without one of its own, a host that restarts would not seem to have rebooted.
cat /proc/sys/kernel/random/uuid > /run/boot_id
mount --bind /run/boot_id /proc/sys/kernel/random/boot_id
rm /run/boot_id

# A rehearsal reaches its own network and nothing else; without a route, whoever tries learns it at once.
if [ -n "${DFLASH_FLEET_OFFLINE:-}" ]; then
    ip route del default 2>/dev/null || true
    ip -6 route del default 2>/dev/null || true
    unset DFLASH_FLEET_OFFLINE
fi

root=/sys/fs/cgroup
if [ "$(stat -f -c %T "$root")" = cgroup2fs ]; then
    # Docker hands the tree over read-only; systemd makes groups in it.
    mount -o remount,rw "$root" || true
else
    # The controller has the old or the hybrid layout. Servers of today run the unified one, and newer releases of
    # systemd refuse anything else: take this container's own branch of the unified tree where the kernel has one.
    # Only a branch has a cgroup.events file; the controller's own root is nothing to hand to a host.
    mkdir /run/cgroup2
    if mount -t cgroup2 cgroup2 /run/cgroup2 2>/dev/null && [ -e /run/cgroup2/cgroup.events ]; then
        umount -R "$root"
        mount -t cgroup2 -o nosuid,nodev,noexec,relatime cgroup2 "$root"
    fi
    umount /run/cgroup2 2>/dev/null || true
    rmdir /run/cgroup2
fi
exec /lib/systemd/systemd
