package simulator

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
)

func TestA50SizesOfInstances(t *testing.T) {
	r := newRack(t, engine.Config{})
	for memory, want := range map[oxide.ByteCount]string{
		1 << 29:     `unsupported value for "size": memory must be at least 1 GiB`,
		1<<30 + 512: `unsupported value for "size": memory must be divisible by 1 GiB`,
		1537 << 30:  `unsupported value for "size": memory must be less than or equal to 1536 GiB`,
	} {
		body := r.instanceBody("new")
		body.Memory = memory
		_, err := r.doCreate(body)
		refusedAs(400, "InvalidValue", "%s", want).check(t, err)
	}
	body := r.instanceBody("new")
	body.Ncpus, body.Memory = 254, 1536<<30
	must[*oxide.Instance](t)(r.doCreate(body))
}

// Of two mistakes that follow each other here, the rack tells the first.
func TestA66WhatIsWrongWithAnInstanceIsToldInTheRacksOrder(t *testing.T) {
	r := newRack(t, engine.Config{})
	nowhere := uuid.NewString()
	source := createdDisk("x")
	source.Value.(*oxide.InstanceDiskAttachmentCreate).DiskBackend.Value =
		&oxide.DiskBackendDistributed{DiskSource: snapshotSource(nowhere, false)}
	small := createdDisk("x")
	small.Value.(*oxide.InstanceDiskAttachmentCreate).Size = 512
	body := r.instanceBody("a") // whose name is taken
	body.Ncpus, body.Memory = 255, 1
	body.BootDisk, body.Disks = source, slices.Repeat([]oxide.InstanceDiskAttachment{small}, 12)
	body.EnableJumboFrames = oxide.NewPointer(true)
	for _, test := range []struct {
		want refused
		mend func()
	}{
		{refusedAs(400, "InvalidRequest", "cannot have more than 254 vCPUs per instance"),
			func() { body.Ncpus = 2 }},
		{refusedAs(400, "InvalidValue", `unsupported value for "size": memory must be at least 1 GiB`),
			func() { body.Memory = 1 << 30 }},
		{refusedAs(400, "InvalidRequest", "cannot attach more than 12 disks to instance"),
			func() { body.Disks = body.Disks[:1] }},
		{refusedAs(404, "ObjectNotFound", "not found: snapshot with id %q", nowhere),
			func() { body.BootDisk = createdDisk("y") }},
		{refusedAs(400, "InvalidValue",
			`unsupported value for "size": total size must be at least 1 GiB`),
			func() { body.Disks[0] = attachedDisk("nope") }},
		{refusedAs(400, "InvalidRequest", "enable_jumbo_frames may only be set on an instance when "+
			"the fleet-wide jumbo-frames opt-in is enabled by a fleet administrator"),
			func() { body.EnableJumboFrames, body.NetworkInterfaces = nil, interfaces() }},
		{refusedAs(400, "InvalidRequest", "All interfaces must be in the same VPC"),
			func() { body.NetworkInterfaces = interfaces("nope/default") }},
		{refusedAs(400, "ObjectAlreadyExists", `already exists: instance "a"`),
			func() { body.Name = "new" }},
		{gone("vpc", "nope"),
			func() { body.NetworkInterfaces = oxide.InstanceNetworkInterfaceAttachment{} }},
		{gone("disk", "nope"), func() { body.Disks = nil }},
		{refused{}, func() {}},
	} {
		_, err := r.doCreate(body)
		test.want.check(t, err)
		test.mend()
	}
}

// interfaces asks for one interface in each "vpc/subnet".
func interfaces(networks ...string) oxide.InstanceNetworkInterfaceAttachment {
	create := &oxide.InstanceNetworkInterfaceAttachmentCreate{
		Params: []oxide.InstanceNetworkInterfaceCreate{}}
	for n, network := range networks {
		vpc, subnet, _ := strings.Cut(network, "/")
		create.Params = append(create.Params, oxide.InstanceNetworkInterfaceCreate{
			Name: oxide.Name("nic" + string(rune('a'+n))), VpcName: oxide.Name(vpc),
			SubnetName: oxide.Name(subnet)})
	}
	return oxide.InstanceNetworkInterfaceAttachment{Value: create}
}

func TestA64WhereAnInstancesInterfacesMayBe(t *testing.T) {
	r := newRack(t, engine.Config{})
	oneVPC := refusedAs(400, "InvalidRequest", "All interfaces must be in the same VPC")
	for _, test := range []struct {
		name     string
		networks []string
		want     refused
	}{
		{"nowhere", nil, oneVPC},
		{"in two VPCs", []string{"default/default", "other/default"}, oneVPC},
		{"in a VPC that is not there", []string{"other/default"}, gone("vpc", "other")},
		{"in a subnet that is not there", []string{"default/other"}, gone("vpc-subnet", "other")},
		{"two in one subnet", []string{"default/default", "default/default"},
			refusedAs(400, "InvalidRequest", "Each interface must be in a distinct VPC Subnet")},
		{"eight", slices.Repeat([]string{"other/default"}, 8), gone("vpc", "other")},
		{"nine, which is told before their VPCs", slices.Repeat([]string{"a/a", "b/b", "c/c"}, 3),
			refusedAs(400, "InvalidRequest", "An instance may not have more than 8 network interfaces")},
	} {
		t.Run(test.name, func(t *testing.T) {
			body := r.instanceBody("new")
			body.NetworkInterfaces = interfaces(test.networks...)
			_, err := r.doCreate(body)
			test.want.check(t, err)
		})
	}
}

// configured asks for one interface with an ip_config.
func configured(stack oxide.PrivateIpStackCreate) oxide.InstanceNetworkInterfaceAttachment {
	nics := interfaces("default/default")
	params := nics.Value.(*oxide.InstanceNetworkInterfaceAttachmentCreate).Params
	params[0].IpConfig = stack
	return nics
}

var (
	autoV4 = oxide.PrivateIpv4StackCreate{Ip: oxide.Ipv4Assignment{Value: &oxide.Ipv4AssignmentAuto{}}}
	autoV6 = oxide.PrivateIpv6StackCreate{Ip: oxide.Ipv6Assignment{Value: &oxide.Ipv6AssignmentAuto{}}}
)

func TestA52AnInstanceHasTheInterfacesItAskedFor(t *testing.T) {
	type attachment = oxide.InstanceNetworkInterfaceAttachment
	r := newRack(t, engine.Config{})
	for _, test := range []struct {
		name string
		nics attachment
		want []string
		// external says that A65 gives it an address.
		external bool
	}{
		{"by default", attachment{}, []string{"net0 dual_stack"}, true},
		{"IPv4", attachment{Value: &oxide.InstanceNetworkInterfaceAttachmentDefaultIpv4{}},
			[]string{"net0 v4"}, true},
		{"IPv6", attachment{Value: &oxide.InstanceNetworkInterfaceAttachmentDefaultIpv6{}},
			[]string{"net0 v6"}, false},
		{"none", attachment{Value: &oxide.InstanceNetworkInterfaceAttachmentNone{}}, nil, false},
		{"its own", interfaces("default/default"), []string{"nica dual_stack"}, true},
		{"its own with IPv4", configured(oxide.PrivateIpStackCreate{
			Value: &oxide.PrivateIpStackCreateV4{Value: autoV4}}), []string{"nica v4"}, true},
		{"its own with IPv6", configured(oxide.PrivateIpStackCreate{
			Value: &oxide.PrivateIpStackCreateV6{Value: autoV6}}), []string{"nica v6"}, false},
		{"its own with both", configured(oxide.PrivateIpStackCreate{
			Value: &oxide.PrivateIpStackCreateDualStack{Value: oxide.PrivateIpStackCreateDualStackValue{
				V4: autoV4, V6: autoV6}}}), []string{"nica dual_stack"}, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			body := r.instanceBody("new")
			body.NetworkInterfaces, body.Start = test.nics, oxide.NewPointer(false)
			i := must[*oxide.Instance](t)(r.doCreate(body))
			if got := r.interfaces(i.Id); !slices.Equal(got, test.want) {
				t.Errorf("got %q, want %q", got, test.want)
			}
			if got := r.externalIPs(i.Id); (len(got) == 1) != test.external {
				t.Errorf("A65: it has the external addresses %+v", got)
			}
			if err := r.InstanceDelete(t.Context(),
				oxide.InstanceDeleteParams{Instance: oxide.NameOrId(i.Id)}); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// interfaces lists the name and the stack of each interface.
func (r *rack) interfaces(id string) (names []string) {
	for _, nic := range must[[]oxide.InstanceNetworkInterface](r.t)(
		r.InstanceNetworkInterfaceListAllPages(r.t.Context(),
			oxide.InstanceNetworkInterfaceListParams{Instance: oxide.NameOrId(id)})) {
		names = append(names, string(nic.Name)+" "+string(nic.IpStack.Type()))
	}
	return names
}

func (r *rack) externalIPs(id string) []oxide.ExternalIp {
	return must[*oxide.ExternalIpResultsPage](r.t)(r.InstanceExternalIpList(r.t.Context(),
		oxide.InstanceExternalIpListParams{Instance: oxide.NameOrId(id)})).Items
}

func TestA65InstancesShareAddressesButNoPorts(t *testing.T) {
	r := newRack(t, engine.Config{})
	seen := map[string]string{}
	for _, name := range []string{"a", "b", "idle"} {
		ips := r.externalIPs(r.instance(name).Id)
		if len(ips) != 1 {
			t.Fatalf("%s has the external addresses %+v, want one", name, ips)
		}
		snat, ok := ips[0].Value.(*oxide.ExternalIpSnat)
		if !ok || *snat.LastPort-*snat.FirstPort != 16383 || *snat.FirstPort%16384 != 0 {
			t.Fatalf("%s has %+v", name, ips[0].Value)
		}
		ports := snat.Ip + " " + string(rune('0'+*snat.FirstPort/16384))
		if other, taken := seen[ports]; taken {
			t.Errorf("%s and %s share %s", name, other, ports)
		}
		seen[ports] = name
	}
}

func TestWhatTheSimulatorDoesNotGiveAnInstanceIs501(t *testing.T) {
	r := newRack(t, engine.Config{})
	explicit := autoV4
	explicit.Ip.Value = &oxide.Ipv4AssignmentExplicit{Value: "172.30.0.77"}
	transit := autoV4
	transit.TransitIps = []oxide.Ipv4Net{"10.0.0.0/8"}
	v4 := func(v4 oxide.PrivateIpv4StackCreate) oxide.InstanceNetworkInterfaceAttachment {
		return configured(oxide.PrivateIpStackCreate{Value: &oxide.PrivateIpStackCreateV4{Value: v4}})
	}
	for part, change := range map[string]func(*oxide.InstanceCreate){
		"external_ips": func(body *oxide.InstanceCreate) {
			body.ExternalIps = []oxide.ExternalIpCreate{{Value: &oxide.ExternalIpCreateEphemeral{}}}
		},
		"explicit ip_config": func(body *oxide.InstanceCreate) { body.NetworkInterfaces = v4(explicit) },
		"transit_ips":        func(body *oxide.InstanceCreate) { body.NetworkInterfaces = v4(transit) },
		"ncpus of 0":         func(body *oxide.InstanceCreate) { body.Ncpus = 0 },
	} {
		body := r.instanceBody("new")
		change(body)
		_, err := r.doCreate(body)
		refusedAs(501, "", "the simulator does not have an instance's %s, which the rack has", part).
			check(t, err)
	}
}
