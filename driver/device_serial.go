package driver

import "bytes"

// serialBytes is how much of a disk's name the guest sees: NVMe has 20 bytes for the serial number.
const serialBytes = 20

// diskSerial is the serial number under which a guest sees the disk with that name.
func diskSerial(diskName string) string {
	return diskName[:min(len(diskName), serialBytes)]
}

// parseSerial takes a serial as sysfs writes it. Oxide fills the 20 bytes with NULs, NVMe asks for
// spaces, and sysfs ends the line.
func parseSerial(b []byte) string {
	return string(bytes.Trim(b, "\x00 \n\t"))
}
