//go:build linux

package driver

import (
	"encoding/binary"
	"testing"
)

func TestAnExtThatMeetsAnErrorTurnsReadOnly(t *testing.T) {
	for _, fsType := range []string{fsExt3, fsExt4} {
		t.Run(fsType, func(t *testing.T) {
			g := newGuest(t)
			v := g.volume(g.attach(testSerial, 64*mib), fsType)
			must(t, v.stage())
			const behaviour, remountReadOnly = 0x3C, 2
			b := v.disk.readAt(t, extOffset, extBytes)
			if got := binary.LittleEndian.Uint16(b[behaviour:]); got != remountReadOnly {
				t.Fatalf("the behaviour at errors is %d, want %d", got, remountReadOnly)
			}
		})
	}
}
