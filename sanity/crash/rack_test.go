//go:build linux

package crash_test

// rackKind is the life in which the rack is killed.
const rackKind = "rack ext4"

func (l *life) onRack(v *volume) error { return nil }
