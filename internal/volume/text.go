package volume

import "fmt"

// NameAndID returns how messages show an object of the rack: people and the rack's console know the
// name, Kubernetes the id. Either may be unknown.
func NameAndID(name, id string) string {
	switch {
	case name == "":
		return id
	case id == "":
		return name
	}
	return fmt.Sprintf("%.80s (%.80s)", name, id)
}

// SizeText returns how messages show a size: in the GiB that people ask for, and exactly.
func SizeText(bytes int64) string {
	switch {
	case bytes < GiB/100:
		return fmt.Sprintf("%d bytes", bytes)
	case bytes%GiB == 0:
		return fmt.Sprintf("%d GiB (%d bytes)", bytes/GiB, bytes)
	}
	return fmt.Sprintf("%.2f GiB (%d bytes)", float64(bytes)/float64(GiB), bytes)
}
