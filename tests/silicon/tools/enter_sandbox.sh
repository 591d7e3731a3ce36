#!/bin/sh
# Run a command in the sandbox: enter_sandbox.sh ROOT MODE PROJECT OUT COMMAND...   (environment: as it is)
#   MODE device     a made-up sysfs and device node of a Strix NPU
#   MODE no-device  the sysfs of this machine, no NPU
#   MODE locked     as device, but the node belongs to root and the command runs as nobody
# PROJECT is mounted read-only on /project, OUT read-write on /out ("-": not mounted). Every mount is in a private
# namespace, so nothing stays mounted, whatever happens to the command.
set -eu
[ "${SANDBOX_INSIDE:-}" = 1 ] || SANDBOX_INSIDE=1 exec unshare --mount --propagation private "$0" "$@"
root=$1 mode=$2 project=$3 out=$4
shift 4
unset SANDBOX_INSIDE

mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
if [ "$project" != - ]; then
    mount --bind "$project" "$root/project"
    mount -o remount,bind,ro "$root/project"
fi
[ "$out" = - ] || mount --bind "$out" "$root/out"

if [ "$mode" = no-device ]; then
    mount -t sysfs -o ro sysfs "$root/sys"
    mount -t tmpfs tmpfs "$root/dev/accel"
    exec chroot "$root" "$@"
fi

mount -t tmpfs tmpfs "$root/sys"
pci=devices/pci0000:00/0000:c5:00.1
npu=$root/sys/$pci
mkdir -p "$npu/accel/accel0" "$root/sys/class/accel" "$root/sys/bus/pci/devices" \
    "$root/sys/bus/pci/drivers/amdxdna" "$root/sys/module/amdxdna"
attribute() { printf '%s\n' "$2" >"$npu/$1"; }
attribute vendor 0x1022
attribute device 0x17f0
attribute revision 0x11
attribute subsystem_vendor 0x1022
attribute subsystem_device 0x17f0
attribute device_type 0
attribute vbnv "NPU Strix (fake)"
attribute fw_version 1.5.5
ln -s "../../../$pci" "$root/sys/bus/pci/devices/0000:c5:00.1"
ln -s "../../../../$pci" "$root/sys/bus/pci/drivers/amdxdna/0000:c5:00.1"
ln -s "../../$pci/accel/accel0" "$root/sys/class/accel/accel0"
ln -s ../.. "$npu/accel/accel0/device"
printf '2.25.0\n' >"$root/sys/module/amdxdna/version"

# The device's memory: a sparse file, on tmpfs so that it costs what is written to it.
mount -t tmpfs tmpfs "$root/dev/accel"
: >"$root/dev/accel/accel0"
if [ "$mode" = locked ]; then
    chmod 600 "$root/dev/accel/accel0"
    exec chroot --userspec=nobody:nogroup "$root" "$@"
fi
exec chroot "$root" "$@"
