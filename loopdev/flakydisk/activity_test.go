package flakydisk

import (
	"testing"
	"time"
)

func TestActivityCoversTheLastMinute(t *testing.T) {
	d, began := NewDisk(nil), time.Unix(1_000_000, 0)
	d.count(OnRead, began)
	d.count(OnFlush, began.Add(time.Second))
	d.count(OnWrite, began.Add(ActivitySeconds*time.Second)) // the read is now a minute old
	got := d.Activity(began.Add(ActivitySeconds * time.Second))
	want := map[int]Activity{0: {Flushes: 1}, ActivitySeconds - 1: {Writes: 1}}
	for i, a := range got {
		if a != want[i] {
			t.Errorf("second %d: %+v, want %+v", i, a, want[i])
		}
	}
	if len(got) != ActivitySeconds {
		t.Errorf("%d seconds, want %d", len(got), ActivitySeconds)
	}
}
