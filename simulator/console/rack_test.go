package console

import (
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

func TestACardHasTheLastLinesOfASerialConsole(t *testing.T) {
	const text = "lost\r\n1\r\r\n\x1b[1;32m2\x1b[0m <b>\n3\xff\n4\x07\n"
	if got, want := lastLines(text), "1\n2 <b>\n3�\n4"; got != want {
		t.Errorf("the last lines are %q, want %q", got, want)
	}
}

func TestACardHasTheBootDiskFirstAndASlotForEachDisk(t *testing.T) {
	disk := func(id, description string) adminapi.Disk {
		return adminapi.Disk{Identity: adminapi.Identity{ID: id, Name: id, Description: description}}
	}
	boot := "z"
	attached := []adminapi.Disk{disk("b", ""), disk("z", "the boot disk"),
		disk("a", `csi {"name":"pvc-1","claim":"shop/orders"}`), disk("c", `csi {"name":"pvc-2"}`)}
	for limit, want := range map[int]string{
		6: "*z shop/orders b pvc-2  ", 2: "*z shop/orders b pvc-2",
	} {
		var got []string
		for _, s := range newCard(adminapi.Instance{BootDiskID: &boot}, attached, limit).Slots {
			mark := ""
			if s.Boot {
				mark = "*"
			}
			got = append(got, mark+s.Label)
		}
		if got := strings.Join(got, " "); got != want {
			t.Errorf("with a limit of %d the slots are %q, want %q", limit, got, want)
		}
	}
}
