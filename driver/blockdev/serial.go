package blockdev

import "bytes"

// parseSerial takes a serial as sysfs writes it. Oxide fills the 20 bytes with NULs, NVMe asks for
// spaces, and sysfs ends the line.
func parseSerial(b []byte) string {
	return string(bytes.Trim(b, "\x00 \n\t"))
}
