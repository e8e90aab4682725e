#!/bin/sh
# Turns a minimal Debian tree with the packages of packages.txt into the image of a rehearsal host.
# Runs inside the tree: by chroot after debootstrap, or as a RUN step of the Containerfile.
set -eu

# Identity belongs to a host, not to its image: each host makes its own keys and machine id when it first boots.
rm -f /etc/ssh/ssh_host_* /var/lib/dbus/machine-id /var/lib/systemd/random-seed
: > /etc/machine-id
mkdir -p /etc/systemd/system/ssh.service.d
cat > /etc/systemd/system/ssh.service.d/host-keys.conf <<'UNIT'
[Service]
Environment=KEY=/etc/ssh/ssh_host_ed25519_key
# Made once, so a reboot keeps the host's identity; of one kind, since an RSA key is most of the boot's time.
ExecStartPre=
ExecStartPre=/bin/sh -c '[ -s ${KEY} ] || ssh-keygen -q -t ed25519 -N "" -f ${KEY}'
ExecStartPre=/usr/sbin/sshd -t
UNIT

# A fleet tool opens many connections at once from an address that has no name.
mkdir -p /etc/ssh/sshd_config.d
cat > /etc/ssh/sshd_config.d/10-fleet.conf <<'CONF'
HostKey /etc/ssh/ssh_host_ed25519_key
UseDNS no
MaxStartups 500:30:1000
MaxSessions 200
PasswordAuthentication no
PermitRootLogin prohibit-password
CONF
systemctl enable ssh.service

# Servers keep their journal over a reboot.
mkdir -p /var/log/journal
chgrp systemd-journal /var/log/journal
chmod 2755 /var/log/journal

# No seats, no consoles, no hardware of its own; and nothing that wants the network at boot.
for unit in console-getty.service getty.target getty@tty1.service systemd-udevd.service systemd-udevd-control.socket \
    systemd-udevd-kernel.socket systemd-udev-trigger.service systemd-networkd-wait-online.service systemd-resolved.service \
    systemd-timesyncd.service apt-daily.timer apt-daily-upgrade.timer; do
    ln -sf /dev/null "/etc/systemd/system/$unit"
done

# Where the image came from is no business of a host (a mirror's address may hold a password).
rm -f /etc/apt/sources.list.d/*
echo '# The hosts of a rehearsal fleet reach no package mirror.' > /etc/apt/sources.list
# Left over from the machine that builds; a container build has mounts in their place, and keeps nothing of them.
rm -f /etc/hostname /etc/resolv.conf 2>/dev/null || true
echo 'LANG=C.UTF-8' > /etc/default/locale

apt-get clean
rm -rf /var/lib/apt/lists/* /var/cache/debconf/*-old /var/log/*.log /var/log/apt /tmp/* /var/tmp/*
find /usr/share/doc -mindepth 1 ! -name copyright ! -type d -delete
find /usr/share/doc -mindepth 1 -type d -empty -delete
rm -rf /usr/share/man/* /usr/share/info/* /usr/share/locale/* /usr/share/i18n /usr/share/lintian

# The tree is up to date with its packages: the first boot need not rebuild caches as after an upgrade.
touch /etc/.updated /var/.updated
