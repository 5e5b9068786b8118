package driver

import (
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide.go/oxide"
	"pgregory.net/rapid"
)

func TestE17TheNameOfADiskIsTheHashOfItsVolume(t *testing.T) {
	for csiName, want := range map[string]string{
		"pvc-6fa1d3ac-1234-4a5b-8c6d-7e8f9a0b1c2d": "csi-hpcv1i4tn2rop6ah",
		"日本/ü\t": "csi-1gi5nnadptjaev48",
	} {
		if got := diskName("blue", csiName); got != want {
			t.Errorf("diskName(blue, %q) = %q, want %q", csiName, got, want)
		}
	}
}

func TestE17EveryNameIsOneTheRackTakes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		// Short ones, so that some are equal, and ends of one are the beginning of the other.
		short := rapid.StringOfN(rapid.SampledFrom([]rune("ab-.ü")), 0, 3, -1)
		a, b := short.Draw(t, "a"), short.Draw(t, "b")
		one, other := short.Draw(t, "cluster of a"), short.Draw(t, "cluster of b")
		name := diskName(one, a)
		if len(name) != 20 || !isOwnName(name) || !rackName.MatchString(name) {
			t.Fatalf("diskName(%q, %q) = %q", one, a, name)
		}
		if again := diskName(other, b); (a == b && one == other) != (name == again) {
			t.Fatalf("%q of %q and %q of %q have the names %q and %q", a, one, b, other, name, again)
		}
	})
}

func TestForeignNamesAreTold(t *testing.T) {
	for _, name := range []string{"", "csi-", "csi-0123456789abcde", "csi-0123456789abcdef0",
		"csi-0123456789abcdeF", "csi-0123456789abcdez", "pvc-0123456789abcdef",
		"csi-0123456789abc-ef"} {
		if isOwnName(name) {
			t.Errorf("isOwnName(%q)", name)
		}
	}
}

func TestOnlyUUIDsReachTheRack(t *testing.T) {
	for id, want := range map[string]string{
		testDisk:                                 testDisk,
		strings.ToUpper(testDisk):                testDisk,
		"":                                       "",
		"fake-vol-id":                            "",
		"6a3e0f2c7e5c4b7a9a520a4c9a1f0b01":       "",
		"{6a3e0f2c-7e5c-4b7a-9a52-0a4c9a1f0b01}": "",
		"urn:uuid:6a3e0f2c-7e5c-4b7a-9a52-0a4c9a1f0b01": "",
		"6a3e0f2c-7e5c-4b7a-9a52-0a4c9a1f0b0g":          "",
	} {
		got, ok := rackID(id)
		if ok != (want != "") || (ok && string(got) != want) {
			t.Errorf("rackID(%q) = %q, %v", id, got, ok)
		}
	}
}

func TestADescriptionIsReadBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := mark{
			Name:        rapid.StringN(1, 40, 128).Draw(t, "name"),
			Cluster:     rapid.String().Draw(t, "cluster"),
			MkfsOptions: rapid.String().Draw(t, "options"),
		}
		if got, ok := readMark(m.description()); !ok || got != m {
			t.Fatalf("readMark(%q) = %+v, %v", m.description(), got, ok)
		}
	})
	for _, foreign := range []string{"", "my disk", "csi.oxide.computer", "csi.oxide.computer {",
		"csi.oxide.computer {}", `csi.oxide.computer.evil {"name":"x"}`} {
		if m, ok := readMark(foreign); ok {
			t.Errorf("readMark(%q) = %+v", foreign, m)
		}
	}
}

func TestE17ANameBelongsToOneCluster(t *testing.T) {
	disk := func(cluster, name string) *oxide.Disk {
		return &oxide.Disk{Name: oxide.Name(name), Description: mark{Name: "db",
			Cluster: cluster}.description()}
	}
	for _, test := range []struct {
		name  string
		disk  *oxide.Disk
		words string // of why it is foreign; empty: it is the cluster blue's
	}{
		{"the cluster's own", disk("blue", diskName("blue", "db")), ""},
		{"another cluster's of the same volume name", disk("red", diskName("red", "db")), `"red"`},
		{"one without a cluster", disk("", diskName("", "db")), `""`},
		{"a tag of ours on another cluster's name", disk("blue", diskName("red", "db")),
			"another name"},
		{"a tag of ours on a name without a cluster", disk("blue", diskName("", "db")),
			"another name"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if why := foreignDisk(test.disk, "blue"); (why == "") != (test.words == "") ||
				!strings.Contains(why, test.words) {
				t.Errorf("foreignDisk says %q, want %q", why, test.words)
			}
			// An audit owns, and deletes, what its own cluster made, and nothing else.
			snapshot := &oxide.Snapshot{Name: test.disk.Name, Description: test.disk.Description}
			if why := foreignSnapshot(snapshot, "blue"); (why == "") != (test.words == "") {
				t.Errorf("foreignSnapshot says %q, want %q", why, test.words)
			}
		})
	}
}
